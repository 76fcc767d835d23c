"""The Triton programs themselves. Importing these files imports Triton, which `import credo` never does."""
