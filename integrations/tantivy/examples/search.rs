//! An index of tantivy in far memory beside one in memory and one in files: answers, times, resident memory of the process.
//!
//! `cargo run --release --example search -- far` and `-- memory` and `-- files`, each in a process of its own. With `far`
//! the process has a limit of 64 MiB, or that of `LIMIT`. `DOCUMENTS` is another number of documents than 100,000.

use anyhow::{Context, Result, bail};
use farheap::{FarHeap, Heap};
use farheap_tantivy::FarDirectory;
use std::time::Instant;
use tantivy::collector::{Count, TopDocs};
use tantivy::directory::{Directory, MmapDirectory, RamDirectory};
use tantivy::merge_policy::NoMergePolicy;
use tantivy::query::QueryParser;
use tantivy::schema::{STORED, Schema, TEXT, Value};
use tantivy::{Index, IndexSettings, IndexWriter, Searcher, TantivyDocument, doc};

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();
const WORDS: u64 = 150; // Of a document.
const VOCABULARY: u64 = 50_000;
const QUERIES: u64 = 1_000;

/// The number at a place of a sequence without order.
fn mixed(at: u64) -> u64 {
    let mixed = at.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 20
}

/// A word; few are frequent.
fn word(at: u64) -> String {
    let x = mixed(at);
    format!("w{}", (x % VOCABULARY).min(x / VOCABULARY % VOCABULARY).min(mixed(x) % VOCABULARY))
}

/// Documents with both words of each query, and best ones whose stored text has the first.
fn search(searcher: &Searcher, parser: &QueryParser) -> Result<(usize, usize)> {
    let text = searcher.schema().get_field("text")?;
    let mut sums = (0, 0);
    for (one, other) in (0..QUERIES).map(|at| (word(5 * at), word(5 * at + 1))) {
        let query = parser.parse_query(&format!("+{one} +{other}"))?;
        let best = (Count, TopDocs::with_limit(1).order_by_score());
        let (count, best) = searcher.search(&query, &best)?;
        sums.0 += count;
        for (_, at) in best {
            let document: TantivyDocument = searcher.doc(at)?;
            let text = document.get_first(text).and_then(|text| text.as_str());
            sums.1 += usize::from(text.is_some_and(|text| text.split(' ').any(|word| word == one)));
        }
    }
    Ok(sums)
}

/// Does something and prints how long that took, what it returned, and the peak of resident memory so far.
fn timed<T: std::fmt::Debug>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<()> {
    let began = Instant::now();
    let (answer, seconds) = (work()?, began.elapsed().as_secs_f64());
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find(|line| line.starts_with("VmHWM")).context("no VmHWM")?;
    println!("{what:<28} {seconds:7.2} s  {answer:?}  {}", peak.replace('\t', " "));
    Ok(())
}

fn main() -> Result<()> {
    let documents = std::env::var("DOCUMENTS").map_or(Ok(100_000), |text| text.parse())?;
    let files = tempfile::tempdir_in(".")?; // Not in memory, as /tmp may be.
    let directory: Box<dyn Directory> = match std::env::args().nth(1).as_deref() {
        Some("memory") => Box::new(RamDirectory::create()),
        Some("files") => Box::new(MmapDirectory::open(files.path())?),
        None | Some("far") => {
            let limit = std::env::var("LIMIT").unwrap_or_else(|_| "64MiB".to_owned());
            match Heap::builder().set("limit", &limit)?.dir(files.path()).start() {
                Ok(heap) => Box::new(FarDirectory::new(&heap)),
                Err(error) => {
                    println!("skipped: {error}");
                    return Ok(());
                }
            }
        }
        Some(other) => bail!("{other}: far, memory or files"),
    };
    let mut schema = Schema::builder();
    let text = schema.add_text_field("text", TEXT | STORED);
    let index = Index::create(directory, schema.build(), IndexSettings::default())?;
    let mut writer: IndexWriter = index.writer_with_num_threads(1, 16 << 20)?;
    writer.set_merge_policy(Box::new(NoMergePolicy)); // All segments are merged at once below.
    timed("indexed", || {
        for at in 0..documents {
            let words: Vec<String> = (0..WORDS).map(|word_at| word(WORDS * at + word_at)).collect();
            writer.add_document(doc!(text => words.join(" ")))?;
        }
        Ok(writer.commit()?)
    })?;
    let parser = QueryParser::for_index(&index, vec![text]);
    timed("queries", || search(&index.reader()?.searcher(), &parser))?;
    timed("merged", || Ok(writer.merge(&index.searchable_segment_ids()?).wait()?.is_some()))?;
    timed("queries again", || search(&index.reader()?.searcher(), &parser))
}
