"""What a result looks like, wherever it is shown: which number is which colour, what stands on a cell, what is cut.

The figures of `interp.plot`, the pages of `interp.pages` and the live page of `interp.serve` draw these specs, each
with its own means, so that a number has one colour, one name and one way of writing everywhere.

    scale.py        how numbers become colours
    maps.py         a map of coloured cells, and how many texts it may hold
    writing.py      how a number is written
    heads.py, attribution.py, patching.py, ablation.py, lenses.py   the specs of these results
"""
