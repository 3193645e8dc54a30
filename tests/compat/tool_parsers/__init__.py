"""Tests of other projects' tool parsers, run with the gateway's."""
