"""The link to the best bundle of a run whose folder is copied from an object store."""

import time

from pyarrow import fs
from servers.object_store import object_store

from marl_ray.training.run_folder.bundle_link import link_bundle, linked_bundle

LOCAL = fs.LocalFileSystem()


def test_the_link_of_a_copied_run_leads_to_its_own_bundle(tmp_path):
    with object_store(f"bucket-{time.time_ns()}") as uri:  # a server forgets nothing within its process
        filesystem, root = fs.FileSystem.from_uri(uri)
        for name in ("runs", "copies"):
            filesystem.create_dir(f"{root}/{name}/first/checkpoint_3/bundle")
        link_bundle(filesystem, f"{root}/runs/first", "checkpoint_3", f"{uri}/runs/first")
        assert linked_bundle(filesystem, f"{root}/runs/first") == f"{uri}/runs/first/checkpoint_3/bundle"
        fs.copy_files(f"{root}/runs/first/bundle", f"{root}/copies/first/bundle", filesystem, filesystem)
        assert linked_bundle(filesystem, f"{root}/copies/first") == f"{uri}/copies/first/checkpoint_3/bundle"
        (tmp_path / "first" / "checkpoint_3" / "bundle").mkdir(parents=True)
        fs.copy_files(f"{root}/runs/first/bundle", f"{tmp_path}/first/bundle", filesystem, LOCAL)
        assert linked_bundle(LOCAL, f"{tmp_path}/first") == f"{tmp_path}/first/checkpoint_3/bundle"
        # Copied from a disk by something that follows links.
        filesystem.create_dir(f"{root}/others/first/bundle")
        assert linked_bundle(filesystem, f"{root}/others/first") == f"{uri}/others/first/bundle"
        link_bundle(filesystem, f"{root}/others/first", "checkpoint_4", f"{uri}/others/first")
        assert linked_bundle(filesystem, f"{root}/others/first") == f"{uri}/others/first/checkpoint_4/bundle"
        infos = filesystem.get_file_info(fs.FileSelector(f"{root}/others/first"))
        assert [(info.base_name, info.type) for info in infos] == [("bundle", fs.FileType.File)]
