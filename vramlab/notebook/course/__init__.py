"""The exercises of the course, a module for each notebook: ``n03.EXERCISES``. How to write one: `vramlab.notebook.exercises`."""
