//! The comparison of every declaration with the installed headers, by a C program that is made from the declarations.
//!
//! Skipped, with the reason on standard error, where there is no C compiler or no header. With
//! `TOWLINE_VERBS_HEADERS=required` in the environment (`ci/verbs-layout`) that is a failure.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How a declared struct relates to the header's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "spelled in the declarations")]
pub(crate) enum Form {
    /// All of it.
    exact,
    /// Its first fields.
    prefix,
    /// Its last fields, counted back from the field `context`.
    tail,
}

/// A declared struct or union.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) c: &'static str,
    pub(crate) form: Form,
    pub(crate) size: usize,
    pub(crate) fields: Vec<Field>,
}

/// A field of it.
#[derive(Debug, Clone)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) offset: usize,
    pub(crate) size: usize,
    /// In C, empty for what is not compared.
    pub(crate) ty: String,
}

/// A declared function.
#[derive(Debug, Clone)]
pub(crate) struct Signature {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    pub(crate) required: bool,
    /// The type of a pointer to it, in C.
    pub(crate) ty: String,
}

/// All that is declared.
#[derive(Debug, Clone)]
struct Declared {
    layouts: Vec<Layout>,
    constants: Vec<(&'static str, i64)>,
    signatures: Vec<Signature>,
}

impl Declared {
    fn all() -> Self {
        let layouts = [
            crate::device::layouts(),
            crate::memory::layouts(),
            crate::completion::layouts(),
            crate::queue_pair::layouts(),
            crate::context::layouts(),
        ];
        let constants = [
            crate::device::CONSTANTS,
            crate::memory::CONSTANTS,
            crate::completion::CONSTANTS,
            crate::queue_pair::CONSTANTS,
            crate::context::CONSTANTS,
        ];
        Self { layouts: layouts.concat(), constants: constants.concat(), signatures: crate::library::signatures() }
    }

    fn fields(&self) -> usize {
        self.layouts.iter().map(|layout| layout.fields.len()).sum()
    }

    /// What the header should say, a line for each fact, with `?` where C has to say more than Rust knows.
    fn expected(&self) -> Vec<String> {
        let mut lines = vec![];
        for Layout { c, form, size, fields } in &self.layouts {
            let base = base(*form, fields);
            match form {
                Form::prefix => lines.push(format!("{c} has at least {size} bytes: 1")),
                Form::exact | Form::tail => lines.push(format!("{c} has {} bytes", *size as i64 - base)),
            }
            for field in fields {
                lines.push(format!("{c} {} is at {}", field.c_name(), field.offset as i64 - base));
                lines.push(format!("{c} {} has {} bytes", field.c_name(), field.size));
                if !field.ty.is_empty() {
                    lines.push(format!("{c} {} is of type {}: 1", field.c_name(), field.ty));
                }
            }
        }
        for (name, value) in &self.constants {
            lines.push(format!("{name} = {value}"));
        }
        for signature in &self.signatures {
            lines.push(format!("{} is of type {}: 1", signature.name, signature.ty));
        }
        lines
    }

    /// The program that says it.
    fn program(&self) -> String {
        let mut c = String::from(
            "#include <stddef.h>\n#include <stdint.h>\n#include <stdio.h>\n#include <sys/types.h>\n\
             #include <infiniband/verbs.h>\n\
             #ifndef IBV_ACCESS_OPTIONAL_FIRST\n#define IBV_ACCESS_OPTIONAL_FIRST IB_UVERBS_ACCESS_OPTIONAL_FIRST\n#endif\n\
             int main(void) {\n",
        );
        let mut line = |text: &str, value: &str| {
            let text = text.replace('%', "%%");
            writeln!(c, "printf(\"{text}\\n\", (long long)({value}));").unwrap();
        };
        for Layout { c, form, size, fields } in &self.layouts {
            let base = match form {
                Form::tail => format!("(long long)offsetof({c}, context)"),
                Form::exact | Form::prefix => "0".into(),
            };
            match form {
                Form::prefix => {
                    line(&format!("{c} has at least {size} bytes: @"), &format!("sizeof({c}) >= {size}"));
                }
                Form::exact | Form::tail => line(&format!("{c} has @ bytes"), &format!("sizeof({c}) - {base}")),
            }
            for field in fields {
                let name = field.c_name();
                line(&format!("{c} {name} is at @"), &format!("offsetof({c}, {name}) - {base}"));
                line(&format!("{c} {name} has @ bytes"), &format!("sizeof((({c} *)0)->{name})"));
                if !field.ty.is_empty() {
                    let is = type_is(&format!("(({c} *)0)->{name}"), &field.ty);
                    line(&format!("{c} {name} is of type {}: @", field.ty), &is);
                }
            }
        }
        for (name, _) in &self.constants {
            line(&format!("{name} = @"), name);
        }
        for signature in &self.signatures {
            let is = type_is(&format!("&{}", signature.name), &signature.ty);
            line(&format!("{} is of type {}: @", signature.name, signature.ty), &is);
        }
        c.push_str("return 0;\n}\n");
        c.replace('@', "%lld")
    }
}

impl Field {
    fn c_name(&self) -> &'static str {
        self.name.strip_prefix("r#").unwrap_or(self.name)
    }
}

/// What offsets and sizes are counted from.
fn base(form: Form, fields: &[Field]) -> i64 {
    match form {
        Form::exact | Form::prefix => 0,
        Form::tail => fields.iter().find(|field| field.name == "context").unwrap().offset as i64,
    }
}

/// 1 if the expression is of the type. The kernel's 64-bit integers are `unsigned long long` where the C library's are
/// `unsigned long`; both will do.
fn type_is(expression: &str, ty: &str) -> String {
    let other = ty.replace("uint64_t", "unsigned long long");
    let other = if other == ty { String::new() } else { format!("{other}: 1, ") };
    format!("_Generic({expression}, {ty}: 1, {other}default: 0)")
}

/// What Rust expects and C did not say.
fn differences(declared: &Declared, said: &str) -> Vec<String> {
    let said: std::collections::HashSet<&str> = said.lines().collect();
    declared.expected().into_iter().filter(|line| !said.contains(line.as_str())).collect()
}

/// A folder of this test's own, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("towline-verbs-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

/// Compiles `source` in `folder`; the error is the compiler's.
fn compile(folder: &Path, source: &str) -> Result<PathBuf, String> {
    let (file, program) = (folder.join("check.c"), folder.join("check"));
    std::fs::write(&file, source).unwrap();
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let out = Command::new(&cc)
        .args(["-std=gnu11", "-Wall", "-Werror", "-Wno-address"])
        .arg(&file)
        .arg("-o")
        .arg(&program)
        .output();
    match out {
        Err(error) => Err(format!("{cc}: {error}")),
        Ok(out) if out.status.success() => Ok(program),
        Ok(out) => Err(format!("{cc}: {}: {}", out.status, String::from_utf8_lossy(&out.stderr))),
    }
}

/// Runs a compiled program and returns what it printed.
fn run(program: &Path) -> String {
    let out = Command::new(program).output().unwrap();
    assert!(out.status.success(), "{}", out.status);
    String::from_utf8(out.stdout).unwrap()
}

/// Whether the headers can be used here; if not, why.
fn usable(folder: &Path) -> Result<(), String> {
    compile(folder, "int main(void) { return 0; }\n").map_err(|e| format!("no working C compiler: {e}"))?;
    // The newest function that is declared here.
    let newest = "#include <infiniband/verbs.h>\nint main(void) { return sizeof(&ibv_query_qp_data_in_order) == 0; }\n";
    compile(folder, newest)
        .map_err(|e| format!("no headers of rdma-core 36 or newer (libibverbs-dev): {}", first_line(&e)))?;
    Ok(())
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// Whether the environment says that nothing may be skipped.
pub(crate) fn required() -> bool {
    std::env::var_os("TOWLINE_VERBS_HEADERS").is_some_and(|value| value == "required")
}

/// Says on standard error, past the test harness, that a test has proved nothing here; or fails, where that is not allowed.
pub(crate) fn skip(test: &str, reason: &str) {
    assert!(!required(), "{test}: {reason}");
    writeln!(std::io::stderr(), "SKIPPED {test}: {reason}").unwrap();
}

#[test]
fn every_declaration_agrees_with_the_headers() {
    let folder = Folder::new("layout");
    if let Err(reason) = usable(&folder.0) {
        return skip("every_declaration_agrees_with_the_headers", &reason);
    }
    let declared = Declared::all();
    let program = compile(&folder.0, &declared.program()).unwrap();
    let said = run(&program);
    assert_eq!(differences(&declared, &said), Vec::<String>::new());

    // The comparison sees a single wrong fact of every kind, wherever it is planted.
    for (i, layout) in declared.layouts.iter().enumerate() {
        for j in 0..layout.fields.len() {
            let mut wrong = declared.clone();
            wrong.layouts[i].fields[j].offset += 8;
            let seen = differences(&wrong, &said).len();
            // Everything of a tail is counted from its field `context`.
            let whole = layout.form == Form::tail && layout.fields[j].name == "context";
            assert_eq!(seen, if whole { layout.fields.len() } else { 1 }, "{} {}", layout.c, layout.fields[j].name);
            let mut wrong = declared.clone();
            wrong.layouts[i].fields[j].size += 4;
            assert_eq!(differences(&wrong, &said).len(), 1, "{} {}", layout.c, layout.fields[j].name);
        }
        let mut wrong = declared.clone();
        wrong.layouts[i].size += 8;
        assert_eq!(differences(&wrong, &said).len(), 1, "{}", layout.c);
    }
    for i in 0..declared.constants.len() {
        let mut wrong = declared.clone();
        wrong.constants[i].1 ^= 1;
        assert_eq!(differences(&wrong, &said).len(), 1, "{}", declared.constants[i].0);
    }
    println!(
        "{} structs and unions, {} fields, {} constants, {} functions",
        declared.layouts.len(),
        declared.fields(),
        declared.constants.len(),
        declared.signatures.len()
    );
    assert!(declared.fields() > 300 && declared.constants.len() > 150 && declared.signatures.len() > 40);
}

#[test]
fn a_wrong_type_is_seen() {
    let folder = Folder::new("types");
    if let Err(reason) = usable(&folder.0) {
        return skip("a_wrong_type_is_seen", &reason);
    }
    let mut wrong = Declared::all();
    let mut planted = vec![];
    // In each signature, another type of the result; in each typed field, another sign, width or signature.
    for signature in &mut wrong.signatures {
        signature.ty = format!("struct ibv_sge {}", &signature.ty[signature.ty.find("(*)").unwrap()..]);
        planted.push(format!("{} is of type {}: 1", signature.name, signature.ty));
    }
    for layout in &mut wrong.layouts {
        for field in layout.fields.iter_mut().filter(|field| !field.ty.is_empty()) {
            field.ty = if field.ty == "uint16_t " { "int16_t ".into() } else { "uint16_t ".into() };
            planted.push(format!("{} {} is of type {}: 1", layout.c, field.c_name(), field.ty));
        }
    }
    let said = run(&compile(&folder.0, &wrong.program()).unwrap());
    assert_eq!(differences(&wrong, &said), {
        // In the order of `expected`: structs first.
        let functions = wrong.signatures.len();
        planted.rotate_left(functions);
        planted
    });
}
