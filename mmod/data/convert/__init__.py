"""Converters of tables and conversation files into shards."""
