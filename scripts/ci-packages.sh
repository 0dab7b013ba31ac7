# The packages that are built with features. cargo gives dependencies the features of the packages that are named: with the same ones each time
# they are built once. Sourced by what builds them.
packages=(-p candle-train-emulator -p candle-ops -p candle-comm -p candle-data -p candle-parallel -p candle-trainer -p candle-train-cli -p candle-train-tests
    -p candle-train-examples)
