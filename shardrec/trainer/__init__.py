"""The application: data, models, training runs and the command line, which see the library through its public names."""
