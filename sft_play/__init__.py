"""sft_play: plan, explain and run supervised fine-tuning with one Makefile."""

__version__ = "0.1.0"
