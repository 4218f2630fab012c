"""The teachers of a run, a file for each kind; ``run_teachers`` lists them."""
