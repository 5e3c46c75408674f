"""black_box: run a program from elsewhere as a stage."""
