"""Serves Kimi-K3: engine, handoff, OpenAI API and router."""
