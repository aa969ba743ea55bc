"""The embedded model: how it is trained, what it was trained on, and its file."""

from pathlib import Path

FILE = Path(__file__).with_name("slotcache-demo.gguf")
