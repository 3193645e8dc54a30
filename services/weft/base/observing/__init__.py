"""Logs, traces, the event-loop watchdog and load reports."""
