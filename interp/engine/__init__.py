"""The imperative shell: what asks the model, one pass or millions of them.

a pass        batch text observe hooks analysis          generation     generate decode sampling text_stream
a sweep       sweep variants base_run plan climb metrics
data          rows text_file table_file files sources -> stream -> feed
a run         run: work (one window), progress + journal + work_folder (what is done), memory, progress_bar,
              workers (processes), shard (Ray), tensor_parallel (models larger than a device)
a store       store store_writer (activations on disk)
a record      record run_file experiment experiment_folder step_files comparison provenance
"""
