"""What a kernel calls that is launched while the kernel before it on the stream still runs (`KernelSource.overlaps`):
`gdc_wait` before it reads or writes anything, in all of its programs, so that whoever waits for it has waited for all
kernels before; and `gdc_launch_dependents` from when on the next such kernel may be launched.
"""

from __future__ import annotations

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait"]
