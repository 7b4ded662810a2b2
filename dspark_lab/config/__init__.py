"""`LabConfig`, its parts, the presets and the legal values of every toggle. Standard library only."""

from dspark_lab.config.choices import ALLOCS, Alloc, alloc_name, parse_alloc
from dspark_lab.config.lab import LabConfig, toggle_names
from dspark_lab.config.parts import DecoderConfig, DrafterConfig, EngineConfig, ModelConfig, ParallelConfig
from dspark_lab.config.presets import PRESETS, preset

__all__ = [
    "ALLOCS",
    "PRESETS",
    "Alloc",
    "DecoderConfig",
    "DrafterConfig",
    "EngineConfig",
    "LabConfig",
    "ModelConfig",
    "ParallelConfig",
    "alloc_name",
    "parse_alloc",
    "preset",
    "toggle_names",
]
