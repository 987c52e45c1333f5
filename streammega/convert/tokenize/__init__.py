"""Documents as tokens: tokenizers, chat templates, texts too long to be held."""
