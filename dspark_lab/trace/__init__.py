"""Traces: Kineto and Chrome JSON read leniently, steps, waits and launches as tables. Without torch."""

from dspark_lab.trace.integrity import Integrity
from dspark_lab.trace.model import Trace, TraceSet
from dspark_lab.trace.source import open_trace
from dspark_lab.trace.summary import summarize

__all__ = ["Integrity", "Trace", "TraceSet", "open_trace", "summarize"]
