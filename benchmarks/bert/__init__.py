"""Masked-LM steps of BERT on batches whose sequences have the lengths of real text."""
