"""Calls that together run every shipped form of the Hopper kernels, for the tests of their machine code."""

from __future__ import annotations

from machine_code import Call

_HEADS = {
    "16": Call(head_dim=16, head_dim_v=16),
    "64": Call(),
    "64-short": Call(seq_q=1024, seq_k=1024),
    "64-long": Call(seq_q=16384, seq_k=16384),
    "80": Call(head_dim=80, head_dim_v=80),
    "96": Call(head_dim=96, head_dim_v=96),
    "64x128": Call(head_dim=64, head_dim_v=128),
    "128": Call(head_dim=128, head_dim_v=128),
    "128-short": Call(head_dim=128, head_dim_v=128, seq_q=1024, seq_k=1024),
    "192x128": Call(head_dim=192, head_dim_v=128),
    "192": Call(head_dim=192, head_dim_v=192),
    "256x192": Call(head_dim=256, head_dim_v=192),
    "256": Call(head_dim=256, head_dim_v=256),
}
_MASKS = {
    "full": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 127, "window_right": 0},
    "packed": {"window_right": 0, "sequences": 5},
}

#: "<head>-<mask>" -> call.
FORMS = {
    f"{head}-{mask}": call._replace(**changes) for head, call in _HEADS.items() for mask, changes in _MASKS.items()
}
