//! Indexes larger than the limit: answers as those of tantivy's directory in memory, and what is resident.

mod common;

use common::{allocated, tier};
use farheap::{ByteCount, Heap};
use farheap_tantivy::FarDirectory;
use std::sync::atomic::{AtomicBool, Ordering};
use tantivy::collector::{Count, DocSetCollector, TopDocs};
use tantivy::directory::{Directory, MmapDirectory, RamDirectory};
use tantivy::query::{AllQuery, QueryParser};
use tantivy::schema::{FAST, Field, INDEXED, STORED, Schema, TEXT, Value};
use tantivy::store::Compressor;
use tantivy::{
    DocAddress, Index, IndexSettings, IndexWriter, Searcher, TantivyDocument, Term, doc,
};

const ROOM: ByteCount = ByteCount::gib(1);
/// Documents, and stored bytes of each: 24 MiB, three times the limit.
const DOCUMENTS: u64 = 6000;
const BODY: usize = 4096;
/// Of the writer's thread, the least that tantivy takes.
const WRITER: usize = 15_000_000;

struct Fields {
    number: Field,
    words: Field,
    body: Field,
}

fn schema() -> (Schema, Fields) {
    let mut schema = Schema::builder();
    let number = schema.add_u64_field("number", FAST | INDEXED | STORED);
    let words = schema.add_text_field("words", TEXT);
    let body = schema.add_bytes_field("body", STORED);
    (schema.build(), Fields { number, words, body })
}

/// A number without order (splitmix64).
fn mixed(at: u64) -> u64 {
    let mut x = at.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^ (x >> 31)
}

/// Bytes of a document that no compression makes shorter.
fn body(number: u64) -> Vec<u8> {
    let words = (0..BODY as u64 / 8).flat_map(|at| mixed(1000 * number + at).to_le_bytes());
    words.collect()
}

fn document(fields: &Fields, number: u64) -> TantivyDocument {
    // Frequent and rare words.
    let word = |at| {
        let x = mixed(77 * number + at);
        format!("w{}", (x % 3000).min((x >> 32) % 3000))
    };
    let words: Vec<String> = (0..20).map(word).collect();
    doc!(fields.number => number, fields.words => words.join(" "), fields.body => body(number))
}

fn index(directory: impl Into<Box<dyn Directory>>) -> (Index, Fields) {
    let (schema, fields) = schema();
    let settings = IndexSettings { docstore_compression: Compressor::None, ..Default::default() };
    (Index::create(directory, schema, settings).expect("an index"), fields)
}

fn writer(index: &Index) -> IndexWriter {
    let writer: IndexWriter = index.writer_with_num_threads(1, WRITER).expect("a writer");
    // The tests merge when they want to.
    writer.set_merge_policy(Box::new(tantivy::merge_policy::NoMergePolicy));
    writer
}

/// Adds documents in several commits, so that there are several segments.
fn fill(writer: &mut IndexWriter, fields: &Fields, numbers: std::ops::Range<u64>) {
    for number in numbers.clone() {
        writer.add_document(document(fields, number)).expect("room");
        if (number + 1) % 1000 == 0 || number + 1 == numbers.end {
            writer.commit().expect("room");
        }
    }
}

fn searcher(index: &Index) -> Searcher {
    index.reader().expect("a reader").searcher()
}

fn number(searcher: &Searcher, fields: &Fields, at: DocAddress) -> u64 {
    let document: TantivyDocument = searcher.doc(at).expect("a stored document");
    let number = document.get_first(fields.number).and_then(|value| value.as_u64());
    let number = number.expect("a number");
    let stored = document.get_first(fields.body).and_then(|value| value.as_bytes());
    assert!(stored == Some(&*body(number)), "the body of {number}");
    number
}

/// What a query finds: numbers of all documents, and scores of the best ones, in order. (Which of the documents with equal
/// scores are the best ones depends on the order of segments, which have random names.)
type Answer = (Vec<u64>, Vec<f32>);

/// Answers of many queries.
fn answers(index: &Index, fields: &Fields) -> Vec<Answer> {
    let searcher = searcher(index);
    let parser = QueryParser::for_index(index, vec![fields.words]);
    let one = |at: u64| match at % 3 {
        0 => format!("w{}", mixed(at) % 3000),
        1 => format!("+w{} +w{}", mixed(at) % 40, mixed(at + 1) % 40),
        _ => format!("\"w{} w{}\" number:[{at} TO 4000]", mixed(at) % 9, mixed(at + 1) % 9),
    };
    let ask = |at| {
        let query = parser.parse_query(&one(at)).expect("a query");
        let best = TopDocs::with_limit(5).order_by_score();
        let (all, best) = searcher.search(&query, &(DocSetCollector, best)).expect("an answer");
        for (_, at) in &best {
            number(&searcher, fields, *at);
        }
        let fast = |at: DocAddress| {
            let numbers = searcher.segment_reader(at.segment_ord).fast_fields().u64("number");
            numbers.expect("a column").first(at.doc_id).expect("a number")
        };
        let mut all: Vec<_> = all.into_iter().map(fast).collect();
        all.sort_unstable();
        (all, best.into_iter().map(|(score, _)| score).collect())
    };
    (0..30).map(ask).collect()
}

/// Fails unless the tier had to evict, and kept its limit.
fn check_limit(tier: &Heap) {
    let stats = tier.stats();
    assert!(stats.resident_bytes_max <= stats.limit_bytes, "{stats}");
    // What jemalloc knows about far memory is local memory.
    let usage = tier.usage();
    assert!(usage.resident_bytes.0 <= stats.limit_bytes.0 + usage.metadata_bytes.0, "{usage}");
    assert!(stats.bytes_written > ByteCount::mib(8), "the limit was at work: {stats}");
    assert!(stats.bytes_read > ByteCount::mib(1), "queries read what was cold: {stats}");
}

#[test]
fn an_index_larger_than_the_limit_answers_as_one_in_memory_and_merges() {
    let Some(tier) = tier("larger", ROOM) else { return };
    let (stock, fields) = index(RamDirectory::create());
    let mut stock_writer = writer(&stock);
    fill(&mut stock_writer, &fields, 0..DOCUMENTS);
    let none = allocated(&tier);
    let directory = FarDirectory::new(&tier);
    let (far, _) = index(directory.clone());
    let mut far_writer = writer(&far);
    fill(&mut far_writer, &fields, 0..DOCUMENTS);
    assert!(directory.file_bytes() > ByteCount::mib(24), "{}", directory.file_bytes());
    let expected = answers(&stock, &fields);
    let found = expected.iter().filter(|(all, _)| !all.is_empty()).count();
    assert!(found > 15, "{found} queries find something");
    assert!(answers(&far, &fields) == expected);
    assert!(far.validate_checksum().expect("all files").is_empty());

    // Every third document goes, and the rest becomes one segment.
    for writer in [&mut stock_writer, &mut far_writer] {
        for number in (0..DOCUMENTS).step_by(3) {
            writer.delete_term(Term::from_field_u64(fields.number, number));
        }
        writer.commit().expect("room");
    }
    let before = directory.file_bytes();
    for (index, writer) in [(&stock, &mut stock_writer), (&far, &mut far_writer)] {
        let segments = index.searchable_segment_ids().expect("segments");
        assert!(segments.len() >= 6, "{} segments", segments.len());
        writer.merge(&segments).wait().expect("a merge");
        writer.garbage_collect_files().wait().expect("files");
        assert_eq!(index.searchable_segment_ids().expect("segments").len(), 1);
    }
    assert!(answers(&far, &fields) == answers(&stock, &fields), "after the merge");
    assert_eq!(searcher(&far).search(&AllQuery, &Count).expect("a count"), 4000);
    check_limit(&tier);

    // The old segments' memory is back.
    let files = directory.file_bytes();
    assert!(files.0 * 4 < before.0 * 3, "{files} of {before}");
    let used = allocated(&tier).0 - none.0;
    assert!(used < files.0 + files.0 / 4, "{used} bytes for files of {files}");
    far_writer.wait_merging_threads().expect("no merge");
    drop((far, directory));
    let left = allocated(&tier).0 - none.0;
    assert!(left < 1 << 20, "{left} bytes are left");
}

#[test]
fn searchers_see_whole_commits_while_a_writer_works() {
    const STEP: u64 = 250;
    let Some(tier) = tier("beside", ROOM) else { return };
    let (far, fields) = index(FarDirectory::new(&tier));
    let mut writer: IndexWriter = far.writer_with_num_threads(2, 2 * WRITER).expect("a writer");
    let reader = far.reader().expect("a reader");
    let is_over = AtomicBool::new(false);
    let search = || {
        let (mut before, mut turns) = (0, 0_u64);
        while !is_over.load(Ordering::Acquire) || turns < 20 {
            reader.reload().expect("the last commit");
            let searcher = reader.searcher();
            let count = searcher.search(&AllQuery, &Count).expect("a count") as u64;
            assert!(count.is_multiple_of(STEP) && count >= before, "{count} after {before}");
            if count > 0 {
                // A stored document, from any segment.
                let query = Term::from_field_u64(fields.number, mixed(turns) % count);
                let query = tantivy::query::TermQuery::new(query, Default::default());
                let best = TopDocs::with_limit(1).order_by_score();
                let found = searcher.search(&query, &best).expect("an answer");
                let found = number(&searcher, &fields, found[0].1);
                assert_eq!(found, mixed(turns) % count);
            }
            (before, turns) = (count, turns + 1);
        }
    };
    std::thread::scope(|scope| {
        let searching: Vec<_> = (0..3).map(|_| scope.spawn(search)).collect();
        for start in (0..16 * STEP).step_by(STEP as usize) {
            for number in start..start + STEP {
                writer.add_document(document(&fields, number)).expect("room");
            }
            writer.commit().expect("room");
        }
        is_over.store(true, Ordering::Release);
        searching.into_iter().for_each(|thread| thread.join().expect("no panic"));
    });
    writer.wait_merging_threads().expect("merges");
    let all = searcher(&far).search(&AllQuery, &Count).expect("a count") as u64;
    assert_eq!(all, 16 * STEP);
    check_limit(&tier);
}

#[test]
fn an_index_outlives_its_process_in_another_directory() {
    let Some(tier) = tier("persisted", ROOM) else { return };
    let directory = FarDirectory::new(&tier);
    let (far, fields) = index(directory.clone());
    let mut far_writer = writer(&far);
    fill(&mut far_writer, &fields, 0..3000);
    let expected = answers(&far, &fields);
    // While there is a writer, whose lock does not go along.
    let files = tempfile::tempdir().expect("a directory");
    let on_disk = MmapDirectory::open(files.path()).expect("a directory");
    directory.persist(&on_disk).expect("a disk");
    assert!(answers(&Index::open(on_disk.clone()).expect("the index"), &fields) == expected);
    assert!(directory.persist(&on_disk).is_err(), "an index is there");
    drop((far_writer, far, directory));

    let loaded = FarDirectory::load(&tier, &on_disk).expect("room");
    let far = Index::open(loaded.clone()).expect("the index");
    assert!(answers(&far, &fields) == expected, "loaded");
    // It goes on: files of before are tantivy's to collect.
    let mut far_writer = writer(&far);
    fill(&mut far_writer, &fields, 3000..4000);
    let segments = far.searchable_segment_ids().expect("segments");
    far_writer.merge(&segments).wait().expect("a merge");
    far_writer.garbage_collect_files().wait().expect("files");
    assert_eq!(searcher(&far).search(&AllQuery, &Count).expect("a count"), 4000);
    assert!(loaded.file_bytes() < ByteCount::mib(18), "{}", loaded.file_bytes());
    drop(far_writer);

    let writing: IndexWriter =
        Index::open(on_disk.clone()).expect("the index").writer(WRITER).expect("a writer");
    assert!(FarDirectory::load(&tier, &on_disk).is_err(), "somebody writes there");
    drop(writing);
}

#[test]
fn a_commit_without_memory_fails_and_leaves_the_last_one() {
    let Some(tier) = tier("full", ByteCount::mib(16)) else { return };
    let directory = FarDirectory::new(&tier);
    let (far, fields) = index(directory.clone());
    let mut far_writer = writer(&far);
    fill(&mut far_writer, &fields, 0..500);
    let mut number = 500;
    let error = loop {
        let added = (number..number + 500)
            .try_for_each(|number| far_writer.add_document(document(&fields, number)).map(drop));
        if let Err(error) = added.and_then(|()| far_writer.commit().map(drop)) {
            break error;
        }
        number += 500;
        assert!(number < 20_000, "80 MB in 24 MiB");
    };
    let committed = searcher(&far).search(&AllQuery, &Count).expect("a count") as u64;
    println!("{committed} documents, then: {error}");
    assert_eq!(committed, number, "whole commits");
    drop(far_writer);
    // All of them are there still, stored bytes included.
    let again = Index::open(directory).expect("the index");
    let searcher = searcher(&again);
    let all = searcher.search(&AllQuery, &DocSetCollector).expect("an answer");
    let mut all = Vec::from_iter(all);
    // In the order of the store.
    all.sort_unstable();
    let mut numbers: Vec<_> =
        all.into_iter().map(|at| self::number(&searcher, &fields, at)).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..number).collect::<Vec<_>>());
}
