"""The embedded demo model: `LLM()` with no model name loads this folder (README.md is its card)."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent
