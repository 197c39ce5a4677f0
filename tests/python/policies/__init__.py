"""The eviction methods once more, slowly: an independent float64 reference of what every policy
keeps and merges.

formulas.py   the formulas of the papers
rules.py      a method as parameters of the pipeline; table.py the rows and their variants
sequence.py   one sequence's cache: appending, attention, scoring, layer weights
tiles.py      attention as AMX tiles and products of pairs of bf16 round it
allot.py     whole entries for real weights
choose.py     which entries stay; merge.py what the others give them; classes.py who lives on in whom
streams.py    what a cache is fed; replay.py drives the C backend with it
agree.py      what counts as agreement
"""
