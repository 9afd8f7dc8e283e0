"""Data: text -> tokens on disk -> batches.

    tokenizer.py     characters, byte pairs, Hugging Face's: text -> token ids and back
    prepare.py       text -> a prepared folder
    dataset.py       a prepared folder -> batches and evaluation windows
    shakespeare.py   the text that runs out of the box
    huggingface.py   Llama models, in and out; any run out
    modeling_gpt.py  what opens an exported run that is no Llama
    <name>/          prepare.py and, once that has run, train.bin, val.bin and meta.json
"""
