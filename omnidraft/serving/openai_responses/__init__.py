"""OpenAI's Responses API, translated into chat requests and back; no second way to the engine, and nothing is kept."""
