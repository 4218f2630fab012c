"""Bytes as ids."""
