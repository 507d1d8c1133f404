"""Serving: a trained model with its tables quantized, in a file that programs without Python can call.

::

    sharded model ── quantize.py ──► served model: same plan, same exchanges, tables in fbgemm's inference kernels
                  ── entry.py ──► an entry that takes plain tensors ── script, program_file.py ──► a TorchScript file
                                                    └── program.py, AOTInductor, package.py ──► a file of machine code

docs/serving.md says how to use it; examples/cpp_serving answers requests with either file.
"""

from shardrec.serve.entry import from_tensors
from shardrec.serve.follower import Follower
from shardrec.serve.format import WeightFormat
from shardrec.serve.package import Package, load_package, package
from shardrec.serve.program import ExportError
from shardrec.serve.program_file import NOTES, save
from shardrec.serve.publisher import Publisher
from shardrec.serve.quantize import quantize
from shardrec.serve.served_model import ServedModel
from shardrec.serve.store import Store

__all__ = [
    "NOTES",
    "ExportError",
    "Follower",
    "Package",
    "Publisher",
    "ServedModel",
    "Store",
    "WeightFormat",
    "from_tensors",
    "load_package",
    "package",
    "quantize",
    "save",
]
