"""Processes: the launchers' configuration files, and what runs beside the training. No torch is imported here."""
