"""Ready TrainModules for models of other libraries; each file imports its own library, and nothing here does."""
