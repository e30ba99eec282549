"""Layers of flash-attn that its users and tests import."""
