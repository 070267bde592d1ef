"""Decisions: pure functions from intent and facts to a frozen `Plan` with its reasons. No torch."""
