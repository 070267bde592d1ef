"""Conversations to token rows with a loss mask, through the chat template."""
