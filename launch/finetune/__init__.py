"""`tfdist-finetune`: fine-tunes a language model of KerasHub."""
