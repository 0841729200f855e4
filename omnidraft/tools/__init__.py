"""Tools that a model may call: what a request offers, how models write calls, grammars and parsers of them, prompts."""
