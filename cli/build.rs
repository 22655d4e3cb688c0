//! Builds `libfarheap_preload.so` for the command to embed: `cargo install` installs programs, no libraries.
//!
//! cargo builds no shared library for another package but by artifact dependencies, which are unstable. So the
//! package has the library's sources (`library`, `library.toml`, `library-build.rs`: links into `preload/`, which
//! become files in a package), and they are compiled by a cargo of their own, with the very `farheap` that the
//! command has: its build script tells where that is. Only with the feature `embed` and optimised, so that it is
//! what is released: a debug build finds the library beside itself, where `cargo build` puts it.

use std::env::{var, var_os};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Variables of the outer cargo that are not for another package.
const FOREIGN: [&str; 3] = ["RUSTC_WORKSPACE_WRAPPER", "CARGO_BUILD_TARGET", "CARGO_TARGET_DIR"];

fn main() {
    println!("cargo::rustc-check-cfg=cfg(embedded_library)");
    println!("cargo::rerun-if-changed=build.rs");
    let target = var("TARGET").unwrap_or_default();
    let is_wanted =
        var_os("CARGO_FEATURE_EMBED").is_some() && var("PROFILE").as_deref() == Ok("release");
    // Elsewhere the library is empty, see its `lib.rs`.
    if !is_wanted || target != "x86_64-unknown-linux-gnu" {
        return;
    }
    let own = PathBuf::from(var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(var_os("OUT_DIR").expect("cargo sets it"));
    let farheap = PathBuf::from(var_os("DEP_FARHEAP_DIR").expect("farheap's build script sets it"));
    for path in [
        own.join("library"),
        own.join("library.toml"),
        own.join("library-build.rs"),
        farheap.join("src"),
    ] {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let package = out.join("library");
    fs::create_dir_all(&package).expect("a directory to build in");
    fs::write(package.join("Cargo.toml"), manifest(&own, &farheap)).expect("a manifest");
    // First with what the outer cargo has downloaded, which works without a network; other versions of dependencies
    // than those may be missing, as where they come from a lock file that is older than the registry.
    assert!(
        build(&package, &target, &["--offline"]) || build(&package, &target, &[]),
        "{} could not be built: see above; without the feature `embed` the command looks for it beside itself",
        package.display()
    );
    let built = package.join("target").join(&target).join("release/libfarheap_preload.so");
    let library = fs::read(&built).expect("the library that was built");
    fs::write(out.join("libfarheap_preload.so"), &library).expect("a copy of the library");
    let mut hash = DefaultHasher::new();
    library.hash(&mut hash);
    let version = var("CARGO_PKG_VERSION").unwrap_or_default();
    println!(
        "cargo::rustc-env=FARHEAP_LIBRARY_NAME=libfarheap_preload-{version}-{:016x}.so",
        hash.finish()
    );
    println!("cargo::rustc-cfg=embedded_library");
}

/// The manifest of the library's package here: that of the repository with other paths, and a workspace of its own.
fn manifest(own: &Path, farheap: &Path) -> String {
    let repository = fs::read_to_string(own.join("library.toml")).expect("the library's manifest");
    let (_, rest) = repository.split_once("[dependencies]\n").expect("dependencies");
    let dependencies = rest.split("\n[").next().unwrap_or_default();
    let farheap_here = format!("farheap = {{ path = {farheap:?}");
    let dependencies = dependencies.replace("farheap = { path = \"..\"", &farheap_here);
    assert!(
        dependencies.contains(&farheap_here),
        "the library's dependency on farheap has another form"
    );
    format!(
        "[package]\nname = \"farheap-preload\"\nversion = {:?}\nedition = \"2024\"\nbuild = {:?}\n\n\
         [lib]\npath = {:?}\ncrate-type = [\"cdylib\"]\n\n\
         [dependencies]\n{dependencies}\n\
         [profile.release]\nstrip = true\n\n[workspace]\n",
        var("CARGO_PKG_VERSION").unwrap_or_default(),
        own.join("library-build.rs"),
        own.join("library/lib.rs"),
    )
}

fn build(package: &Path, target: &str, options: &[&str]) -> bool {
    let mut cargo = Command::new(var_os("CARGO").expect("cargo sets it"));
    cargo.args(["build", "--release", "--target", target]).args(options).current_dir(package);
    cargo.arg("--target-dir").arg(package.join("target"));
    for variable in FOREIGN {
        cargo.env_remove(variable);
    }
    cargo.status().is_ok_and(|status| status.success())
}
