"""The ops of aengine.kernels as Triton kernels: one module an op, with the same name and the same contract."""
