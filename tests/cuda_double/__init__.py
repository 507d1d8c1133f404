"""Tensors that Python takes for CUDA's and that are computed on the CPU: a hidden wait for the device is an error.

On a machine without a GPU the code for CUDA would not be run at all. Under :func:`cuda_is_there` and
:func:`cuda_double` whatever is made on ``cuda`` is a :class:`DeviceTensor`: its ``device`` is ``cuda:0``, its values
are those of a CPU tensor inside of it, and each operator on it is looked at first:

=======================================================  ==========================================
operator                                                 on a GPU
=======================================================  ==========================================
``item``, ``tolist``, ``bool``, ``nonzero``, ``unique``  the host waits for the device
``repeat_interleave`` without an output size, masks      likewise
copies to the host, copies from pageable memory          likewise
a CPU tensor (of a dimension or more) beside one         an error, or a copy
an operator of ours that is compiled for the CPU         memory that the host cannot read
a tensor of another stream that was not waited for       half-written memory
rows that are newer in the cache, read behind it         old values
=======================================================  ==========================================

Where the host waits is noted in :attr:`CudaDouble.waits`, or is an error outside of :meth:`CudaDouble.may_wait`.
fbgemm's operators get inputs of the size that the lengths say, as its CPU build demands, and give outputs of the size
that CUDA's would have; what is left over is poison, so that code which reads it is found out. So is what a copy into
pinned memory has not brought yet, because the host has not waited. Kernels in Triton run in its interpreter, or not
at all (:data:`INTERPRETS_TRITON`).
"""

from tests.cuda_double.device import DeviceTensor, HiddenWait, Race
from tests.cuda_double.kernels import CachedKernelDouble
from tests.cuda_double.mode import INTERPRETS_TRITON, CudaDouble, cuda_double, cuda_is_there, to_double, value_of

__all__ = [
    "INTERPRETS_TRITON",
    "CachedKernelDouble",
    "CudaDouble",
    "DeviceTensor",
    "HiddenWait",
    "Race",
    "cuda_double",
    "cuda_is_there",
    "to_double",
    "value_of",
]
