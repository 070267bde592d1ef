"""Files of the machine: written whole or not at all (`atomic`), kept for later runs (`cache`)."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout's folder, or site-packages: the one that holds the package."""
