"""Who imports this before kernels is skipped where they cannot be compiled: without Triton, and in its interpreter."""

import pytest

from flashtile._backends import devices

if devices.triton_missing():
    pytest.skip(devices.triton_missing(), allow_module_level=True)
if devices.interpreting():
    pytest.skip("compiles or launches kernels: needs TRITON_INTERPRET unset", allow_module_level=True)
