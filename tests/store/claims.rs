//! What a store may take the place of, and what it leaves of others.

use super::*;
use std::os::unix::fs::FileExt as _;

/// What a store is opened for, refusing data or not.
type Take = fn(&Path, bool) -> farheap::Result<BlockStore>;

const TAKES: [Take; 2] = [
    |path, overwrite| BlockStore::scratch(path, None, overwrite),
    |path, overwrite| BlockStore::create(path, None, overwrite),
];

fn write_at(path: &Path, bytes: &[u8], offset: u64) {
    let file = File::options().write(true).open(path).expect("open");
    file.write_all_at(bytes, offset).expect("write");
    settle();
}

fn mark(path: &Path) {
    settle();
    drop(BlockStore::scratch(path, None, false).expect("free"));
    settle();
}

/// Asserts that a file is refused and unchanged, and taken when that is allowed.
fn assert_holds(path: &Path, offset: u64) {
    let before = fs::read(path).expect("read");
    for take in TAKES {
        settle();
        assert_says(
            take(path, false),
            path,
            &format!("holds data at byte {offset}, which would be lost"),
        );
        assert!(fs::read(path).expect("read") == before, "byte {offset}: it was changed");
    }
}

#[test]
fn a_file_is_free_only_if_all_of_it_is_zeros() {
    let dir = tempfile::tempdir().expect("directory");
    for offset in [0, 4095, (1 << 20) - 1, 1 << 20, (5 << 20) + 77, (8 << 20) - 1] {
        let path = sparse(dir.path(), 8 << 20);
        write_at(&path, b"x", offset);
        assert_holds(&path, offset);
    }
    for take in TAKES {
        let path = dir.path().join("dense");
        fs::write(&path, vec![0; (3 << 20) + 17]).expect("write");
        settle();
        take(&path, false).expect("zeros");
    }
}

#[test]
fn what_others_wrote_beside_the_mark_is_data() {
    let dir = tempfile::tempdir().expect("directory");
    // What partitioning tools write: all but the first 440 bytes, where the mark is.
    let boot = [&[0; 6], &[0x80; 64][..], b"\x55\xaa"].concat();
    for len in [8 << 20, 80 << 20] {
        let path = sparse(dir.path(), len);
        mark(&path);
        write_at(&path, &boot, 440);
        assert_holds(&path, 446);
        write_at(&path, &[0; 100], 440);
        let margin = if len < 64 << 20 { 128 << 10 } else { 1 << 20 };
        for offset in [439, 4095, 4096, margin - 1] {
            write_at(&path, b"x", offset);
            assert_holds(&path, offset);
            write_at(&path, b"\0", offset);
        }
        // Between the margins are pages, whatever they contain.
        write_at(&path, b"_BHRfS_M", margin);
        mark(&path);
    }
}

#[test]
fn a_mark_is_read_whatever_the_size_and_the_capacity_were_when_it_was_made() {
    let dir = tempfile::tempdir().expect("directory");
    let path = sparse(dir.path(), 8 << 20);
    for (len, capacity) in [(8, None), (256, None), (256, Some(8)), (256, None), (70, None)] {
        File::options().write(true).open(&path).expect("open").set_len(len << 20).expect("length");
        settle();
        let store = BlockStore::scratch(&path, capacity.map(ByteCount::mib), false).expect("free");
        let mut queue = store.open_queue(1).expect("queue");
        for offset in [0, store.capacity().get() - 4096] {
            run(&mut *queue, Op::Write, offset, &whole(&mut pages(1, offset | 1))).expect("write");
        }
    }
}

#[test]
fn what_is_overwritten_leaves_no_signature() {
    let dir = tempfile::tempdir().expect("directory");
    let signatures: [(u64, &[u8]); 6] = [
        (1080, b"\x53\xef"),
        (4096, b"\xfc\x4e\x2b\xa9"),
        ((32 << 10) + 1, b"CD001"),
        ((64 << 10) + 64, b"_BHRfS_M"),
        ((1 << 20) - 4096, b"x"),
        (2 << 20, b"SKUL\xba\xbe"),
    ];
    for take in TAKES {
        let path = sparse(dir.path(), 80 << 20);
        for (offset, magic) in signatures {
            write_at(&path, magic, offset);
        }
        settle();
        assert_says(take(&path, false), &path, "holds data at byte 1080");
        settle();
        drop(take(&path, true).expect("allowed"));
        let bytes = fs::read(&path).expect("read");
        let left = bytes.iter().skip(4096).position(|byte| *byte != 0);
        assert_eq!(left, None, "behind the mark");
        assert!(bytes[440..4096].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn a_file_that_others_may_use_becomes_its_owners_only() {
    let dir = tempfile::tempdir().expect("directory");
    let mode = |path: &Path| fs::metadata(path).expect("file").permissions().mode() & 0o777;
    for take in TAKES {
        for (before, after) in [(0o666, 0o600), (0o640, 0o600), (0o700, 0o700)] {
            let path = sparse(dir.path(), 2 << 20);
            fs::set_permissions(&path, fs::Permissions::from_mode(before)).expect("mode");
            settle();
            drop(take(&path, false).expect("free"));
            assert_eq!(mode(&path), after, "{before:o}");
        }
        let path = sparse(dir.path(), 2 << 20);
        write_at(&path, b"data", 0);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("mode");
        settle();
        take(&path, false).expect_err("data");
        assert_eq!(mode(&path), 0o644, "what is refused stays as it is");
    }
}

#[test]
fn a_file_of_another_user_is_refused_although_it_can_be_written() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("directory");
    for take in TAKES {
        let path = sparse(dir.path(), 2 << 20);
        std::os::unix::fs::chown(&path, Some(65_534), None).expect("root may");
        settle();
        assert_says(take(&path, false), &path, "belongs to user 65534");
        settle();
        BlockStore::open(&path, None).expect("contents that are kept are its owner's business");
    }
}
