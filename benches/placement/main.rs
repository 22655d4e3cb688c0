//! temp
mod run;
mod workload;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let n: u64 = a[1].parse().unwrap();
    for v in run::Variant::all() {
        if a.len() > 3 && !a[3..].contains(&format!("{}:{}", v.structure(), v.name())) {
            continue;
        }
        let mut built: Option<run::Built> = None;
        let mut pl = u64::MAX;
        for l in a[2].split(',').map(|l| l.parse::<u64>().unwrap()) {
            let (cache, local) = run::division(v, n, l);
            if local != pl {
                drop(built.take());
                built = run::build(v, n, local, 1).unwrap();
                pl = local;
                let b = built.as_ref().unwrap();
                println!(
                    "{} built {:?} links {:?} pages {} local {}",
                    v.name(),
                    b.built_in,
                    b.links,
                    b.far_pages,
                    b.local_used
                );
            }
            for u in [0.05, 0.5] {
                let mix = workload::Mix { n, count: 10000, alpha: 0.8, updates: u, seed: 7 };
                let p = built.as_mut().unwrap().measure(cache, l, mix).unwrap();
                println!(
                    "{} L={l} U={u} in {} out {} total {} {:?} sum {:x}",
                    v.name(),
                    p.pages_in,
                    p.pages_out,
                    p.swapped(),
                    p.took,
                    p.sum
                );
            }
        }
    }
}
