"""Serving: a trained model with its tables quantized, in a file that programs without Python can call.

::

    sharded model ── quantize.py ──► served model: same plan, same exchanges, tables in fbgemm's inference kernels
                  ── entry.py ──► an entry that takes plain tensors ── exporter.py ──► a TorchScript file
                                                                                  ──► an exported program
                                                                                  ──► a file of machine code, loader.py

docs/serving.md says how to use it. Examples/cpp_serving answers requests with either file.
"""

from shardrec.files import Store
from shardrec.serve.entry import from_tensors
from shardrec.serve.exporter import NOTES, ExportError, package, save
from shardrec.serve.follower import Follower
from shardrec.serve.loader import Package, load_package
from shardrec.serve.publisher import Publisher
from shardrec.serve.quantize import quantize
from shardrec.serve.row_bytes import WeightFormat
from shardrec.serve.served_model import ServedModel

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
