//! Links libthimble: the file that $THIMBLE_LIBRARY names, or the one that the linker finds.
use std::{env, path::Path};

fn main() {
    println!("cargo:rerun-if-env-changed=THIMBLE_LIBRARY");
    println!("cargo:rustc-link-lib=dylib=thimble");
    if let Ok(library) = env::var("THIMBLE_LIBRARY") {
        let folder = Path::new(&library).parent().expect("THIMBLE_LIBRARY is the path of a file");
        println!("cargo:rustc-link-search=native={}", folder.display());
    }
}
