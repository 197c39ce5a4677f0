"""The eviction methods once more, slowly: an independent float64 reference of what every policy
keeps and merges.

formulas.py   the formulas of the papers
"""
