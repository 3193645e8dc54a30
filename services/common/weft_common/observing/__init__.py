"""Logs, traces, the watchdog of the event loop, and load reports."""
