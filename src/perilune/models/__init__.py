"""One decoder definition, tokenizers, loading and saving in Hugging Face format."""
