"""The benchmark of the operations beside attention: norms, rotary embedding, softmax, losses, the perceptron.

A module for each kind of operation has its cases: sizes, tensors, the plain formula, work in bytes and FLOPs, and how
each implementation is called.
"""
