"""The Triton bodies of the ops in aengine.kernels: one module an op, with the same name and the same contract."""
