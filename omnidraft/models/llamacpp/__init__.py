"""The target as a GGUF file that llama.cpp runs."""
