"""The bundled model: its file, and the corpus of the demo."""

from pathlib import Path

FILE = Path(__file__).with_name("slotcache-demo.gguf")
