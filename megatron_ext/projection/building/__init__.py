"""Building a projection: from two tokenizers, from embeddings, from other projections."""
