"""Observability of an engine: counters, histograms, times of a request, the worker's log records."""
