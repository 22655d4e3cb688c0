//! `farheap top`: what a user sees of a process with a far heap, and of others.

#[path = "../../../network/tests/common/mod.rs"]
mod servers;

use farheap::{Error, Far, Heap};
use nix::sys::memfd::{MFdFlags, memfd_create};
use servers::{Announced, TestServer};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::process::{Child, Command, Output};
use std::sync::Mutex;

/// Held by a test while what this process has is looked at, or files that look like statistics are made in it.
static LOOKED_AT: Mutex<()> = Mutex::new(());

fn top(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_farheap"))
        .arg("top")
        .args(arguments)
        .output()
        .expect("it runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_process_is_shown_with_what_it_has() {
    let _alone = LOOKED_AT.lock();
    let options = Heap::builder().parse("far_limit:16MiB,capacity:64MiB").expect("options");
    let heap = match options.start() {
        Ok(heap) => heap,
        Err(Error::UffdUnavailable { reasons }) => {
            println!("skipped: userfaultfd is not permitted here: {reasons}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let server = TestServer::start(Announced { size: 80 << 20, ..Announced::default() });
    let options = format!("far_limit:8MiB,device:\"{}\"", server.address);
    let tier = Heap::builder().parse(&options).expect("options");
    let cold = heap.add_tier("cold", tier).expect("a tier");
    let mut numbers: allocator_api2::vec::Vec<u64, Far> = allocator_api2::vec::Vec::new_in(Far);
    numbers.extend(0..4 << 20); // 32 MiB.
    let pid = std::process::id().to_string();
    let shown = top(&[&pid, "--count", "2", "--interval", "100ms"]);
    assert!(shown.status.success(), "{shown:?}");
    let table = text(&shown.stdout);
    assert_eq!(table.matches("tier far\n").count(), 2, "{table}");
    assert_eq!(table.matches("tier cold\n").count(), 2, "{table}");
    assert_eq!(table.matches("  server0    up, ").count(), 2, "of one tier of the two: {table}");
    assert!(table.contains("faults/s"), "{table}");
    // The text is of the last second.
    let is_there = || {
        let shown = top(&[&pid, "--count", "1", "--json"]);
        let look: serde_json::Value = serde_json::from_slice(&shown.stdout).expect("JSON");
        let far = &look["tiers"]["far"];
        let number = |name: &str| far[name].as_u64().unwrap_or_else(|| panic!("{name}: {look}"));
        assert_eq!(number("limit_bytes"), 16 << 20);
        assert_eq!(look["tiers"]["cold"]["server0_lacking_bytes"], 0, "{look}");
        assert!(look["resident_bytes"].as_u64().expect("a number") > 1 << 20);
        number("allocated_bytes") >= 32 << 20 && number("bytes_written") > 0
    };
    let mut tries = 0;
    while !is_there() {
        tries += 1;
        assert!(tries < 3000, "the numbers never come");
        // The process writes its numbers once a second, and tells nobody: a look ten times as often.
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let samples = parse_exposition(&text(&top(&["--prometheus", &pid]).stdout));
    let mine = samples.iter().filter(|(labels, _)| labels.contains(&format!("{{pid=\"{pid}\"")));
    let look = top(&[&pid, "--count", "1", "--json"]);
    let look: serde_json::Value = serde_json::from_slice(&look.stdout).expect("JSON");
    let tiers = look["tiers"].as_object().expect("tiers").values();
    let count: usize = tiers.map(|tier| tier.as_object().expect("numbers").len()).sum();
    assert_eq!(mine.count(), count + 1, "{samples:?}"); // Of the process itself.
    let value = |name: &str| samples[&format!("{name}{{pid=\"{pid}\",tier=\"far\"}}")];
    assert_eq!(value("farheap_limit_bytes"), f64::from(16 << 20));
    assert!(value("farheap_written_bytes_total") > 0.0, "{samples:?}");
    drop(numbers);
    cold.shutdown().expect("nothing is in use");
    heap.shutdown().expect("nothing is in use");
    let gone = top(&[&pid]);
    assert!(text(&gone.stderr).contains("has no far heap"), "{gone:?}");
}

/// A process that says `words` where farheap's statistics are.
fn pretender(words: &[u8]) -> Child {
    let flags = MFdFlags::MFD_CLOEXEC;
    let mut file = File::from(memfd_create(c"farheap-stats", flags).expect("a file in memory"));
    file.write_all(words).expect("a file in memory");
    Command::new("sleep").arg("100").stdin(file).spawn().expect("sleep")
}

#[test]
fn statistics_that_are_not_farheaps_are_not_printed() {
    let _alone = LOOKED_AT.lock();
    let escapes =
        "farheap-stats 1 5\ntier \x1b]0;OWNED\x07\x1b[31mEVIL\nresident_bytes 99\nend 5\n";
    let long =
        format!("farheap-stats 1 5\ntier far\n{}end 5\n", "resident_bytes 1\n".repeat(10_000));
    for words in [escapes.as_bytes(), long.as_bytes(), b"\xff\xfe", b""] {
        let mut child = pretender(words);
        let shown = top(&[&child.id().to_string(), "--count", "1"]);
        child.kill().expect("a child");
        child.wait().expect("a child");
        let said = text(&shown.stderr);
        assert!(!shown.status.success() && shown.stdout.is_empty(), "{shown:?}");
        assert!(said.contains("no statistics that this version"), "{said}");
    }
    let mut child = pretender(
        b"farheap-stats 1 5\ntier far\nresident_bytes 18446744073709551615\nlimit_bytes 2\nend 5\n",
    );
    let shown = top(&[&child.id().to_string(), "--count", "1"]);
    child.kill().expect("a child");
    child.wait().expect("a child");
    assert!(shown.status.success() && text(&shown.stdout).contains("16.0 EiB of 2 B"), "{shown:?}");
}

/// Reads the text format of Prometheus; returns values by name and labels. Fails where a collector would: samples of a
/// metric stand together behind its type, no two are the same, and names and labels have their characters.
fn parse_exposition(text: &str) -> BTreeMap<String, f64> {
    let is_name = |name: &str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        name.starts_with("farheap_") && name.bytes().all(is_plain)
    };
    let (mut samples, mut types) = (BTreeMap::new(), BTreeMap::new());
    let (mut helped, mut current) = ("", "");
    for line in text.split_terminator('\n') {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            (helped, _) = rest.split_once(' ').expect("a text");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a type");
            assert!(is_name(name) && name == helped, "{line}");
            assert!(["gauge", "counter", "summary"].contains(&kind), "{line}");
            assert_eq!(name.ends_with("_total"), kind == "counter", "{line}");
            assert_eq!(types.insert(name, kind), None, "{name} has two types");
            current = name;
        } else {
            let (labelled, value) = line.rsplit_once(' ').expect("a value");
            let (name, labels) = labelled.split_once('{').expect("labels");
            assert_eq!(name, current, "{line}");
            let mut rest = labels;
            while rest != "}" {
                let (label, value) = rest.split_once("=\"").expect("a label");
                assert!(label.bytes().all(|byte| byte.is_ascii_lowercase()), "{line}");
                // The first quotation mark behind an even number of backslashes.
                let ends = value.match_indices('"').map(|(at, _)| at);
                let is_end = |at: &usize| {
                    let before = value[..*at].bytes().rev();
                    before.take_while(|byte| *byte == b'\\').count() % 2 == 0
                };
                let end = ends.into_iter().find(is_end).expect("an end of the label's value");
                rest = value[end + 1..].trim_start_matches(',');
            }
            let value: f64 = value.parse().expect("a number");
            assert_eq!(samples.insert(labelled.to_owned(), value), None, "{line}: twice");
        }
    }
    samples
}

#[test]
fn a_collector_reads_the_numbers_of_all_processes_and_none_that_are_not_farheaps() {
    let _alone = LOOKED_AT.lock();
    let words = "farheap-stats 1 5\ntier far\nfaults_read 7\nbytes_read 4096\nfault_ns_p50 1500\n\
                 fault_ns_max 2000000000\nresident_bytes 3\nreads_in_flight 1\nforged_bytes 9\nfaults-read 9\nend 5\n";
    let mut children = [pretender(words.as_bytes()), pretender(words.as_bytes())];
    let mut broken = pretender(b"farheap-stats 1 5\ntier far\nresident_bytes 9\n");
    let all = top(&["--prometheus"]);
    let one = top(&["--prometheus", &children[0].id().to_string()]);
    let of_broken = top(&["--prometheus", &broken.id().to_string()]);
    for child in children.iter_mut().chain([&mut broken]) {
        child.kill().expect("a child");
        child.wait().expect("a child");
    }
    assert!(all.status.success() && one.status.success(), "{all:?} {one:?}");
    assert!(!of_broken.status.success() && of_broken.stdout.is_empty(), "{of_broken:?}");
    let (all, one) = (parse_exposition(&text(&all.stdout)), parse_exposition(&text(&one.stdout)));
    for child in &children {
        let pid = child.id();
        let mine = |labels: &&String| labels.contains(&format!("{{pid=\"{pid}\""));
        assert_eq!(all.keys().filter(mine).count(), 7, "{all:?}");
        for (name, quantile, value) in [
            ("faults_read_total", "", 7.0),
            ("read_bytes_total", "", 4096.0),
            ("resident_bytes", "", 3.0),
            ("reads_in_flight", "", 1.0),
            ("fault_latency_seconds", ",quantile=\"0.5\"", 1.5e-6),
            ("fault_latency_seconds", ",quantile=\"1\"", 2.0),
        ] {
            let sample = format!("farheap_{name}{{pid=\"{pid}\",tier=\"far\"{quantile}}}");
            assert_eq!(all.get(&sample), Some(&value), "{sample}");
        }
        let process = format!("farheap_process_resident_bytes{{pid=\"{pid}\",program=\"sleep\"}}");
        assert!(all.contains_key(&process), "{all:?}");
    }
    let broken = format!("{{pid=\"{}\"", broken.id());
    assert!(!all.keys().any(|labels| labels.contains(&broken)), "{all:?}");
    assert_eq!(one.len(), 7, "{one:?}");
}

#[test]
fn what_cannot_be_shown_is_said_with_the_reason() {
    let refused = |arguments: &[&str]| {
        let output = top(arguments);
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        text(&output.stderr)
    };
    assert!(refused(&["4194399"]).contains("there is no process 4194399"));
    let mut other = Command::new("sleep").arg("100").spawn().expect("sleep");
    let said = refused(&[&other.id().to_string()]);
    other.kill().expect("a child");
    other.wait().expect("a child");
    assert!(said.contains("has no far heap"), "{said}");
    assert!(refused(&["1", "--interval", "1us"]).contains("at least 100ms"));
    assert!(refused(&["--prometheus", "4194399"]).contains("there is no process 4194399"));
    assert!(refused(&["--prometheus", "--json", "1"]).contains("cannot be used with"));
    assert!(refused(&[]).contains("<PID>"));
    assert!(refused(&["x"]).contains("invalid value 'x'"));
}
