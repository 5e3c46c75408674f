"""Stage plugins: one package per kind of stage.

A `spec` module holds the fields, a `stage` module the plugin, and a `loop` module the work. Spec and stage
modules stay light, so that a recipe validates in milliseconds; the loop imports torch when the stage runs.
"""
